"""Convolutions that form S as on a GPU, on whatever device they are."""

from proxprop.transfer import ConvTransfer
from proxprop.transfer.conv_gram import from_image_rows
from proxprop.transfer.transfer import GramMethod


class ByImageRows(ConvTransfer):
    """Products of image rows where they are possible at all; a filter of one entry has no use for them."""

    def _choose(self) -> GramMethod:
        axes = self.geometry.axes(self.batched.shape[2:])
        found = from_image_rows(self.batched, self.geometry, axes)
        return found if found is not None and self.geometry.filter_size != (1, 1) else super()._choose()
