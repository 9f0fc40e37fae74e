"""The real SFT run behind ``make demo``."""
