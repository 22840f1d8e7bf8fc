"""`python -m tandem.inference.publisher`: the publisher as a program."""

from tandem.inference.publisher.publisher import main

if __name__ == "__main__":
    main()
