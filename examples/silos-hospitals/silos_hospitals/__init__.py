"""Benign or not? Eight hospitals learn it together, and each of their patients is hidden."""
