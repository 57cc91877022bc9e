"""What is known of the engines of one model, of their caches, and of what is placed on them."""
