"""The composition root: configuration values -> the concrete functions and objects of a run."""
