"""Experiments whose result is a table or a picture; nothing else imports them."""
