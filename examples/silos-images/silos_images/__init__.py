"""Handwritten digits in a few silos, each of which hides every single one of its pictures."""
