"""Stages that end as stages may: `tools.gpu_check.frame` runs them."""
