"""Images: data sets, where they come from, how clients share them, and augmentation.

`images` has the types `Images` and `Dataset`. `datasets` and `sets` define the data sets, which are
decoded once (`decoding`) into memory-mapped arrays (`cache`); `sources` fetches published ones.
`partition` and `splits` divide the training images among clients; `augment` makes random views. The
registries are `harmonium.data.datasets.datasets` and `harmonium.data.partition.splits`.
"""

from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split, make_split

__all__ = ["Dataset", "Images", "Split", "make_split"]
