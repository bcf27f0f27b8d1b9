"""Sources, packing and the loader, whose state is one number."""
