"""What a comparison shows of its encoders."""

from pathlib import Path

from harmonium.compare import Comparison


def test_encoders_with_a_warning_are_marked():
    rows = ({"encoder": "alone", "knn": 0.5}, {"encoder": "fedavg", "knn": 0.75})
    shown = Comparison(Path(), rows, None, {"alone": "collapsed"}).shown()
    assert shown == [{"encoder": "alone (!)", "kNN": 50.0}, {"encoder": "fedavg", "kNN": 75.0}]


def test_figures_that_are_not_finite_stay_empty():
    rows = ({"encoder": "fedavg", "spread": None, "uniformity": -1.5},)
    shown = Comparison(Path(), rows, None, {}).shown()
    assert shown == [{"encoder": "fedavg", "spread": None, "uniformity": -1.5}]
