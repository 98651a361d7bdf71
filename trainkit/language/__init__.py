"""Language models that are trained further: conversations and pairs of answers as tokens.

A file of rows becomes turns in formats.py, and these become tokens in templates.py. Of them
conversations.py (begin with load_chats) and preferences.py make the sets of a run, and packing.py
fills rows. pretrained.py has the flags, the model and the folder that is written, losses.py the
losses of tokens. Scripts import from here; nothing here touches a step or another wing.
"""

from trainkit.fronts import hand_out

NAMES = {
    "LanguageConfig": "pretrained",
    "PairBatch": "preferences",
    "add_adapter": "pretrained",
    "add_reference": "preferences",
    "answer": "conversations",
    "collate_pairs": "preferences",
    "fit_to_data": "pretrained",
    "load_base": "pretrained",
    "load_chats": "conversations",
    "load_pairs": "preferences",
    "places_of": "losses",
    "sample_prompts": "preferences",
    "token_losses": "losses",
    "warn_of_unlikely": "preferences",
    "write_pretrained": "pretrained",
}

__getattr__ = hand_out(__name__, NAMES)
