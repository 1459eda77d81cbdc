"""``python -m daskps``."""

from daskps.cli import main

main(prog_name="daskps")
