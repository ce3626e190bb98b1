"""How well models do: on GLUE, on labelled images, and against their originals without labels."""

from collabify.evaluation.drift import evaluate_drift
from collabify.evaluation.glue import evaluate_glue
from collabify.evaluation.image import evaluate_image
from collabify.evaluation.predict import predict

__all__ = ["evaluate_drift", "evaluate_glue", "evaluate_image", "predict"]
