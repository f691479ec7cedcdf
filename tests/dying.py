"""An import that fails by something else than ImportError, as one of a package that does not fit its torch may."""

raise RuntimeError("this package was built for another torch")
