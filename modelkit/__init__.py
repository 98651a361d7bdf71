"""What predict.py and app.py do with a trained model: a folder for the Hub, a page to draw on."""
