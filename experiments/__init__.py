"""Experiments on niss. They need a checkout of the repository; the installed package does not contain them."""
