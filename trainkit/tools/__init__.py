"""What uses a finished run: pictures, predictions, a page to draw on, a folder for the Hub."""
