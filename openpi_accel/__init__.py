"""openpi_accel: trains Physical Intelligence's pi0.5 in JAX with upstream openpi's numbers."""

__version__ = "0.1.0"
