"""Links calls to earlier ones by texts alone: values in, links out."""
