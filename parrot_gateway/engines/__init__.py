"""The gateway's side of engines: those that joined over the link, and upstream servers."""
