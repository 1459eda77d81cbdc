"""What kernels offer, one noun a file: every call takes a device and keyword arguments, and checks them."""
