"""Links calls to earlier ones by their texts alone: values in, links out."""
