"""Kernel templates whose source travels in the wheel."""
