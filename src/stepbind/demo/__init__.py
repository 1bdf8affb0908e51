"""Demonstration checkpoints, the stories they were trained on, and fresh questions for them."""
