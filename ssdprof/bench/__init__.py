"""`ssdprof bench`: the kernels alone, on drawn inputs of a model's shape, against the kernels of other libraries."""
