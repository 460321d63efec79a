from fedsieve.cli import main

main()
