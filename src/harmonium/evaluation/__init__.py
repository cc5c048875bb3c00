"""Evaluation of representations: probes, which use labels, and geometry, which needs none.

Every probe takes features, not encoders: `embed` runs the frozen encoder once, and kNN, linear,
few-label and geometry all read the same cached matrix.
"""

from harmonium.evaluation.features import embed
from harmonium.evaluation.geometry import (
    Health,
    alignment,
    effective_rank,
    health,
    spread,
    uniformity,
)
from harmonium.evaluation.knn import knn_accuracy, knn_predict
from harmonium.evaluation.linear import (
    FewLabels,
    LinearProbe,
    few_label_probe,
    linear_probe,
    ridge_probe,
)

__all__ = [
    "FewLabels",
    "Health",
    "LinearProbe",
    "alignment",
    "effective_rank",
    "embed",
    "few_label_probe",
    "health",
    "knn_accuracy",
    "knn_predict",
    "linear_probe",
    "ridge_probe",
    "spread",
    "uniformity",
]
