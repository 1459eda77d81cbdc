"""MEM-PS: a bounded cache of rows in memory over the disk tier."""
