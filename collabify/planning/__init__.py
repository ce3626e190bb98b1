"""What a conversion will do, checked before anything is touched: options, layers, ranks, counts."""

from collabify.planning.asked import Method, Projections, Solver
from collabify.planning.layers import check_finite, count, select
from collabify.planning.request import Request
from collabify.planning.values import ValueRequest

__all__ = [
    "Method",
    "Projections",
    "Request",
    "Solver",
    "ValueRequest",
    "check_finite",
    "count",
    "select",
]
