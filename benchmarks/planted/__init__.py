"""Planted faults: whether a whole job finds what a configuration does wrong, and lets pass what is right."""
