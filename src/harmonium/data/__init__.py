"""Images: what they are, where they come from, and who holds which.

`datasets` decode a data set once into memory-mapped arrays, `sources` fetch the ones that have to
be downloaded, `partition` shares the training images out among clients. The two name tables are
`harmonium.data.datasets.datasets` and `harmonium.data.partition.splits`.
"""

from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split, make_split

__all__ = ["Dataset", "Images", "Split", "make_split"]
