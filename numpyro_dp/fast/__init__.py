"""The structure of a row's density, by which clipped gradients are cheap."""
