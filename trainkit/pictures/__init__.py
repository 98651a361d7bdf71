"""Pictures: folders and sets of them, decoded once; small grey ones, photos in colour."""
