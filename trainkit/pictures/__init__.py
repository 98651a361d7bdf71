"""Pictures: folders, tables and Hub sets of them, as uint8 tensors with a class each.

Begin with sets.py (`load_sets`): splits.py finds the rows of each side and their classes (with
folders.py for folders of files), and decoding.py decodes them once with files.py, which alone opens
pictures. grey.py makes small grey pictures of them, and photos.py those in colour for the networks
of backbones.py. Scripts import from here; this room imports no other wing.
"""

from trainkit.fronts import hand_out

NAMES = {
    "GreyConfig": "flags",
    "PhotoConfig": "flags",
    "PictureConfig": "flags",
    "is_picture": "folders",
    "cut_centre": "files",
    "read_photo_pixels": "files",
    "standardise": "files",
    "load_grey": "grey",
    "load_unlabelled": "grey",
    "border_of": "framing",
    "learn_framing": "framing",
    "read_photo": "framing",
    "Photos": "photos",
    "load_photos": "photos",
    "measure": "photos",
    "Features": "backbones",
    "choose_layout": "backbones",
    "load_network": "backbones",
    "make_network": "backbones",
    "write_timm_folder": "backbones",
    "draw_input": "drawn",
}

__getattr__ = hand_out(__name__, NAMES)
