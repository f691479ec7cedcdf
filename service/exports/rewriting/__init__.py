"""Rewrites Python source with libcst: specialises it for a recipe, inlines small functions, drops what is unused."""
