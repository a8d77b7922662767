"""One private sampler a file."""
