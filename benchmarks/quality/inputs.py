"""Input for every model, out of packages or made from rules: sentences, photographs, reactions.

Each function gives calibration input and held-out input that share no sentence, photograph or
molecule.
"""

import itertools
import random

import datasets
import torch
from PIL import Image
from skimage import data as skimage_data
from sklearn.datasets import load_sample_image
from torch import Tensor

CALIBRATED = ("astronaut", "coffee", "hubble_deep_field", "immunohistochemistry", "china")
HELD_OUT = ("cat", "rocket", "retina", "flower")


def premises(glue: str) -> tuple[list[str], list[str]]:
    """Distinct RTE premises: of the train split, of the validation split."""
    rte = datasets.load_dataset(glue, "rte")
    return tuple(list(dict.fromkeys(rte[split]["sentence1"])) for split in ("train", "validation"))


def photographs(crops: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Square crops of photographs, ``[n, 3, 224, 224]``, as DINOv2 takes them."""
    draw = random.Random(seed)
    return tuple(
        torch.stack([_crop(_photograph(name), draw) for name in names for _ in range(crops)])
        for names in (CALIBRATED, HELD_OUT)
    )


def _photograph(name: str) -> Image.Image:
    if name in ("china", "flower"):
        return Image.fromarray(load_sample_image(f"{name}.jpg"))
    return Image.fromarray(getattr(skimage_data, name)()).convert("RGB")


def whole(names: tuple[str, ...]) -> Tensor:
    """The middle of each photograph, as large as it goes, ``[n, 3, 224, 224]``."""
    return torch.stack([_square(image, min(image.size)) for image in map(_photograph, names)])


def _crop(image: Image.Image, draw: random.Random) -> Tensor:
    side = round(min(image.size) * draw.uniform(0.4, 1.0))
    return _square(image, side, tuple(draw.randint(0, size - side) for size in image.size))


def _square(image: Image.Image, side: int, corner: tuple[int, ...] = ()) -> Tensor:
    left, top = corner or ((size - side) // 2 for size in image.size)
    square = image.crop((left, top, left + side, top + side)).resize((224, 224), Image.BICUBIC)
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(224, 224, 3).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (pixels - mean[:, None, None]) / std[:, None, None]


# Groups that hang on their first atom; the second half of each list is for held-out reactions.
ARYL = ["c1ccccc1", "c1ccc(C)cc1", "c1ccc(OC)cc1", "c1ccc(F)cc1", "c1cccc(Cl)c1", "c1ccncc1"]
ARYL += [
    "c1cccnc1",
    "c1ccc(C#N)cc1",
    "c1ccsc1",
    "c1ccc2ccccc2c1",
    "c1cc(C)on1",
    "c1ccc(C(F)(F)F)cc1",
]
ALKYL = ["CC", "CCC", "C(C)C", "CC1CC1", "CCOC", "Cc1ccccc1"]
ALKYL += ["CCCC", "C1CCCCC1", "CCc1ccccc1", "C1CCOCC1", "CC(C)C", "Cc1ccc(F)cc1"]

# Schotten-Baumann, acid coupling, esterification, Suzuki, Boc removal, hydrolysis, nitro reduction,
# sulfonamide, ether, reductive amination, Buchwald, Boc protection: kinds that the 50 classes hold.
RULES = [
    ("aa", "O=C(Cl){x}.N{y}>>O=C(N{y}){x}"),
    ("xa", "O=C(O){x}.N{y}.CCN=C=NCCCN(C)C>>O=C(N{y}){x}"),
    ("aa", "O=C(O){x}.O{y}.OS(=O)(=O)O>>O=C(O{y}){x}"),
    ("rr", "OB(O){x}.Br{y}.[Na+].[Na+].O=C([O-])[O-]>>{xy}"),
    ("ra", "CC(C)(C)OC(=O)NC{x}.O=C(O)C(F)(F)F>>NC{x}"),
    ("xa", "COC(=O){x}.[OH-].[Na+]>>O=C(O){x}"),
    ("ra", "O=[N+]([O-]){x}.[Fe]>>N{x}"),
    ("ra", "O=S(=O)(Cl){x}.N{y}>>O=S(=O)(N{y}){x}"),
    ("ra", "O{x}.Br{y}.[K+].[K+].O=C([O-])[O-]>>O({y}){x}"),
    ("ra", "O=C{x}.N{y}.[BH4-].[Na+]>>C({x})N{y}"),
    ("rr", "Br{x}.N{y}.CC(C)(C)[O-].[Na+]>>N({y}){x}"),
    ("aa", "NC{x}.CC(C)(C)OC(=O)OC(=O)OC(C)(C)C>>CC(C)(C)OC(=O)NC{x}"),
]


def _bonded(x: str, y: str) -> str:
    """``y`` on the first atom of ``x``, with other ring numbers."""
    head = 2 if x[1:2].isdigit() else 1
    return f"{x[:head]}({y.translate(str.maketrans('12', '34'))}){x[head:]}"


def reactions(seed: int = 0) -> tuple[list[str], list[str]]:
    """Reaction SMILES of twelve kinds; no group of a held-out one is in a calibration reaction."""
    found = []
    for half in (slice(0, 6), slice(6, 12)):
        made = []
        for kinds, rule in RULES:
            pools = [ARYL[half] if k == "r" else ALKYL[half] for k in kinds]
            if kinds[0] == "x":
                pools[0] = ARYL[half] + ALKYL[half]
            made += [rule.format(x=x, y=y, xy=_bonded(x, y)) for x, y in itertools.product(*pools)]
        made = list(dict.fromkeys(made))
        random.Random(seed).shuffle(made)
        found.append(made)
    return found[0], found[1]
