"""Use a trained model: classify pictures or texts, or add predictions to the rows of a table.

python predict.py runs/mnist digit.png photo.jpg

It is trainkit/predict.py, which `python -m trainkit.predict` runs in any folder.
"""

from trainkit import startup

from trainkit.predict import main

if __name__ == "__main__":
    startup.run(main, prints_results=True)
