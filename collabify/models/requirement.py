"""What a converted model needs of transformers where collabify is not installed to ask for it."""

import transformers

LOWEST = (5, 21)  # as in pyproject.toml; 5.20 takes value_columns of ViT for its old value

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < LOWEST:
    raise ImportError(
        f"transformers=={transformers.__version__} must be at least {LOWEST[0]}.{LOWEST[1]} for "
        "this model's modeling_collabify.py. Run: pip install --upgrade transformers"
    )
