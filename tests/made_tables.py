"""Tables, and rows of data sets."""

import numpy as np
import pandas as pd
import torch

import train_regression
from trainkit.config import parse


def add_noise(rows):
    noise = torch.rand(len(rows["a"])).tolist()
    return {"a": [sum(pair) for pair in zip(rows["a"], noise, strict=True)]}


def load(*args):
    """The training rows, the test rows and what is saved with the weights."""
    flags = [str(arg) for arg in args]
    parsed = parse(train_regression.Config, ["--model", "linear", *flags])
    parsed.validate(1)
    train, test, metadata = train_regression.load_data(parsed)
    return train, test, metadata


def frame(size=30):
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "area": random.uniform(20, 200, size).round(2),
            "city": random.choice(["Köln", "Orléans", "Rome"], size),
            "garden": random.choice([True, False], size),
        }
    )
    return table.assign(y=table.area * 3 + 5)


def make_table(path, size=160, **columns):
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.normal(size=(size, 3)), columns=["a", "b", "c"])
    table["kind"] = np.where(table.a + table.b > 0, "high", "low")
    table["y"] = table.a * 2 + np.abs(table.b) + random.normal(size=size) * 0.1
    table.assign(**columns).to_csv(path, index=False)
    return table


def titled(size=240, seed=0, noise=5.0):
    """Goods whose price y is said by two words of their title, and by the number a."""
    random = np.random.default_rng(seed)
    things = {"chair": 50, "table": 120, "sofa": 300, "lamp": 35, "shelf": 80}
    materials = {"oak": 60, "plastic": -30, "silk": 70, "wool": 25}
    others = ["nice", "new", "used", "old", "large", "small", "great", "fine", "hand", "made"]
    titles, prices = [], []
    for _ in range(size):
        thing, material = random.choice([*things]), random.choice([*materials])
        random.shuffle(title := [thing, material, *random.choice(others, 4)])
        titles.append(" ".join(title))
        prices.append(things[thing] + materials[material])
    numbers = random.normal(size=size)
    y = np.array(prices) + 50 * numbers + noise * random.normal(size=size)
    return pd.DataFrame({"a": numbers, "title": titles, "y": y.round(2)})


def rated(size, num_classes, seed=0):
    """Reviews whose words have weights; y is in which of equally large classes their sum is."""
    random = np.random.default_rng(seed)
    words = np.array(["".join(random.choice([*"abcdefghij"], 6)) for _ in range(150)])
    chosen = random.integers(len(words), size=(size, 8))
    sums = random.normal(size=len(words))[chosen].sum(1) + random.normal(size=size)
    stars = np.searchsorted(np.quantile(sums, np.arange(1, num_classes) / num_classes), sums)
    texts = [" ".join(row) for row in words[chosen]]
    return pd.DataFrame({"a": random.normal(size=size), "review": texts, "y": stars + 1})
