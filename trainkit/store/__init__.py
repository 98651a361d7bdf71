"""Files that survive a crash, and what is in them."""
