"""Calibration data: names or files in, model inputs out; :func:`load_calibration` is all of it."""

from collabify.data.base import CalibrationData
from collabify.data.loading import load_calibration

__all__ = ["CalibrationData", "load_calibration"]
