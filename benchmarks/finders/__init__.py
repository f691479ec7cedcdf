"""What benchmarks/batch_finder.py runs: its cases, the finders in their children, and the truth they are held to."""
