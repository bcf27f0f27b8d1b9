"""How Adam's moments pass through a device where they are in host memory."""

# Numbers of one page; a multiple of what kernels read at a time. Two pages of two moments in fp32
# are 1 GiB.
PAGE_NUMBERS = 2**26
NUM_PAGES = 2
