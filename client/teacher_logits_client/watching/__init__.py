"""``top``: a server watched from a terminal. Frames are drawn from what it shows, and are pure.

rates       how fast its counts go, from several looks at it
tables      lines that fit a width; what clients named is made harmless
sections    what a frame is made of
frame       a frame of a size: what finds room, and what is left out
watch       what was seen and what was typed, as one scene
asking      looks at the server on a thread, again and again
keys        what is typed
screen      a terminal that is drawn on; what is no such terminal gets frame after frame
command     flags
"""
