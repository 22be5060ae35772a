"""kgen: declarative generator and autotuner of CUDA kernels."""

__version__ = "0.1.0"
