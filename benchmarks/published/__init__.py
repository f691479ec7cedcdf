"""What benchmarks/seed_tables.py runs: published tables as rows of ours, the jobs they are measured on, generation."""
