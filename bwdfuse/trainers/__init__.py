"""One adapter per trainer: each translates that trainer's configuration and nothing else."""
