"""Tools for finished runs: plots, predictions, a page to draw on, a folder for the Hub."""
