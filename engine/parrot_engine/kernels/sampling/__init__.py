"""What is drawn of logits, and the largest of them."""
