"""Tables, and rows of data sets."""

import numpy as np
import pandas as pd
import torch

from examples import table
from trainkit.config import parse


def add_noise(rows):
    noise = torch.rand(len(rows["a"])).tolist()
    return {"a": [sum(pair) for pair in zip(rows["a"], noise, strict=True)]}


def load(*args):
    """The training rows, the test rows and what is saved with the weights, and the plan in it."""
    config = parse(table.Config, [str(arg) for arg in args])
    config.validate(1)
    train, test, metadata, plan = table.load_data(config)
    return train, test, metadata | {"plan": plan}


def frame(size=30):
    random = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "area": random.uniform(20, 200, size).round(2),
            "city": random.choice(["Köln", "Orléans", "Rome"], size),
            "garden": random.choice([True, False], size),
        }
    )
    return rows.assign(y=rows.area * 3 + 5)


def make_table(path, size=160, **columns):
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.normal(size=(size, 3)), columns=["a", "b", "c"])
    table["kind"] = np.where(table.a + table.b > 0, "high", "low")
    table["y"] = table.a * 2 + np.abs(table.b) + random.normal(size=size) * 0.1
    table.assign(**columns).to_csv(path, index=False)
    return table
