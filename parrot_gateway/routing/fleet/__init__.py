"""An upstream of several servers: which of them each call goes to."""
