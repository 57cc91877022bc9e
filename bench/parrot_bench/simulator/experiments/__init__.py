"""The experiments: the paper's figures, engines of today, goodput, ablation."""
