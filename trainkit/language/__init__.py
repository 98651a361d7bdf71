"""Language models that are trained further: conversations and pairs of answers as tokens.

A file of rows becomes turns in formats.py, and these become tokens in templates.py, by the chat
template of the tokenizer. conversations.py and preferences.py make the sets of a run of them, and
packing.py fills rows with samples. losses.py has the losses of tokens, and pretrained.py the flags
of such a run, its model, and the folder that it writes; `python -m trainkit.language.ask` asks it.
Begin with load_chats in conversations.py. Scripts import from here; each name is loaded on its
first use. Nothing here touches a step, a file of the run or another wing.
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
